"""Checks of hosts and links: ``plait doctor``, ``plait check``, and a launcher's check of nodes
before a run."""
