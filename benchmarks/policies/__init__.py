"""The scheduler against published policies, simulated: the same calls and costs for all."""
