"""What becomes of permits that were received again and again: the consumer of the dead-letter queues."""
