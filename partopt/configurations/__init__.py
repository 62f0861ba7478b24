"""Scripts, programs and documents of others, read without executing them."""
