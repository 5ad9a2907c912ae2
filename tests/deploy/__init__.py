"""What runs in an image before lamella does."""
