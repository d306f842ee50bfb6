"""The sweep as a scheduled function: the backstop for when no executor is there to sweep."""
