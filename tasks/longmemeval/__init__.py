"""LongMemEval: a question behind many sessions of a chat, which are read one by one."""
