"""What combines planning, placing, training and diagnosing, as plain functions of values."""
