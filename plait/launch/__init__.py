"""Starting ranks and ending them together."""
