"""The small reasoning model: how it is trained, and the oracle that shows what can be kept on it."""
