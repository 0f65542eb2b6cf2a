"""Conversations: chat templates, and which tokens of a conversation are learned from."""
