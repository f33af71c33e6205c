"""The ways in and out of JSON, TOML and YAML, each within limits, each with one wording of refusals."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["explain", "json_stream", "json_text", "section", "stamped", "toml_text", "typed", "yaml_text"]
