"""What happens to a batch of images before a model sees it."""
