"""Commands that are about the local mesh as a whole, and what all commands share."""
