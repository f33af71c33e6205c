"""Resharding: messages between pipeline stages with different tensor layouts."""
