"""What a host's agent does while ranks train: their rings into files, live metrics, other tools' logs."""
