"""Calibration: a cluster's constants from measurements and logs."""
