# Plait for CPUs: plan, place, train over gloo, look at runs; also the image of pods that a cluster without GPUs runs.
#   docker build -t plait .
#   docker run --rm --shm-size=1g -v "$PWD:/work" plait plait train job.toml
# docs/install.md says how these steps were tried without a builder of images.
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv
COPY . /src
WORKDIR /src
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir -c requirements.lock hatchling setuptools
RUN /build/bin/python -m hatchling build -t wheel -d /wheel && cp requirements.lock /wheel

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-venv && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheel /wheel
# torch's wheels without CUDA are in an index of their own: https://pytorch.org/get-started/locally/
RUN python3 -m venv /opt/plait && /opt/plait/bin/pip install --no-cache-dir -c /wheel/requirements.lock --extra-index-url https://download.pytorch.org/whl/cpu torch
RUN /opt/plait/bin/pip install --no-cache-dir -c /wheel/requirements.lock "$(echo /wheel/plait-*.whl)[train,view,queue,kubernetes]" && rm -r /wheel
ENV PATH=/opt/plait/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /work
CMD ["plait", "--help"]
