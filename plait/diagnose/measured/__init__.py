"""Read recordings and compare them with each other and with a plan."""
