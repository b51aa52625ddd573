"""What both processes do in a round, recorded as a trace for Chrome, Perfetto, or a picture."""
