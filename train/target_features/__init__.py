"""Features of the frozen target: computed online, or stored."""
