"""Readers and writers of JSON, TOML and YAML, each with size limits and one wording of its
errors."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["data", "json_stream", "json_text", "stamped", "toml_text", "yaml_text"]
