"""Agents: the loop that turns an engine's tokens into trajectories, and the sandbox their commands run in."""
