"""The small reasoning model: how it is trained, and the oracle that bounds every eviction method on it."""
