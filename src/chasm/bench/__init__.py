"""Speed measurements of `chasm bench`. A time is shown only if the result has just been compared with float64."""
