"""A Kubernetes ConfigMap with Slurm's topology: Slinky mounts it, Topograph's engine ``slinky`` writes it.

===========  ======================================================================================
known        kind ConfigMap, as JSON or YAML, also as the only item of a list; an entry of its
             ``data`` that is a topology.yaml, else one that is a topology.conf (Slurm reads only
             the first where there are both)
passed over  other entries
refused      a ConfigMap without such an entry
===========  ======================================================================================
"""

from __future__ import annotations

import re
from typing import Any, cast

from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.place.readers import slurm_topology, slurm_yaml
from plait.place.readers.source import Asked, Found, Source

_LOOKS = re.compile(r"^kind:[ \t]*[\"']?ConfigMap\b", re.MULTILINE)
_INSIDE = (slurm_yaml, slurm_topology)


def looks(source: Source) -> bool:
    """Whether a file is one."""
    return _only(source.json) is not None if source.is_json else bool(_LOOKS.search(source.text))


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the entry."""
    value = _only(source.json if source.is_json else load(source.text))
    data: Any = (value or {}).get("data")
    if not isinstance(data, dict):
        raise JobError("no entries", key="data", fix="Give a ConfigMap whose data has a topology.conf or topology.yaml")
    entries = cast("dict[Any, Any]", data)
    texts = {str(key): Source(f"{source.where}: {key}", text) for key, text in entries.items() if isinstance(text, str)}
    for form in _INSIDE:
        for key, inner in texts.items():
            if form.looks(inner.checked()):
                try:
                    found = form.read(inner, asked)
                except JobError as error:
                    at = f"data.{key}" + (f", {error.key}" if error.key else "")
                    raise JobError(error.problem, key=at, fix=error.fix) from None
                over = PassedOver()
                others = [other for other in entries if other != key]
                over.note("entries of the ConfigMap beside the topology", str(next(iter(others), "")), len(others))
                over.add(found.over)
                return Found(topology=found.topology, notes=found.notes, over=over)
    raise JobError("no entry is a topology.conf or a topology.yaml", key="data", fix=f"It has {', '.join(texts)[:200]}")


def _only(value: Any) -> dict[str, Any] | None:
    """The ConfigMap, if it is one."""
    if isinstance(value, dict) and isinstance(items := cast("dict[str, Any]", value).get("items"), list):
        value = cast("list[Any]", items)[0] if len(cast("list[Any]", items)) == 1 else None
    if not isinstance(value, dict) or cast("dict[str, Any]", value).get("kind") != "ConfigMap":
        return None
    return cast("dict[str, Any]", value)
