"""What `lamella doctor` looks at before anybody starts a mesh here, and what it says to do about it."""
