"""Read stored samples: images, audio, tensors and tar shards."""
