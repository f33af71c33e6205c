"""The device, the cores and the process of one rank."""
