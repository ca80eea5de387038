"""HiFi-Mamba: `model` holds the three hosts, the other files the parts they are made of."""
