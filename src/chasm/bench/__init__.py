"""Measuring speed: `chasm bench`. No time is shown of what has not just been compared with a float64 oracle."""
