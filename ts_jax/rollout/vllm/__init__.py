"""vLLM as an engine: its environment, its command, and the part of ours that runs inside it."""
