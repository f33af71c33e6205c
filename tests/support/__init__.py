"""Stand-ins and helpers that several folders of tests share."""
