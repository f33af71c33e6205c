"""Code shared by the readers and writers of other programs' files."""
