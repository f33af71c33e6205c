"""The ways in and out of JSON, TOML and YAML, each within limits, each with one wording of refusals."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["counts", "data", "json_stream", "json_text", "stamped", "toml_text", "words", "yaml_text"]
