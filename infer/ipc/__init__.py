"""The messages between the two processes, their channel, and the draft process as a child."""
