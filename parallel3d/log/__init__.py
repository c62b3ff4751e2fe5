"""Meters, console, JSONL and W&B; what a token costs and how much of the devices was used."""
