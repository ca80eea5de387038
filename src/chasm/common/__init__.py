"""What every package uses and none owns: the registry, files, precision, messages. It imports no other package."""
