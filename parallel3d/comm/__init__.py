"""The only room that sends anything: collectives by axis, channels, the ledger."""
