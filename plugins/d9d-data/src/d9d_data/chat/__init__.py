"""Conversations: records, chat templates, token ids and loss weights."""
