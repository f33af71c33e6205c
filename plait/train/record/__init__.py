"""Records of a run: spans of a step, and their files."""
