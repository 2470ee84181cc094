"""Made conversations that ask for calls of tools."""
