"""What every part stands on: errors, settings, pages for people."""
