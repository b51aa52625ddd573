"""The target's side of a round: requests, scheduling, forward, verification."""
