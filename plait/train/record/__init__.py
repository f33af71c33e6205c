"""What happened when: spans of a step, and their files."""
