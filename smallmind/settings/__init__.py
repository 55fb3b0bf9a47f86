"""Settings: fields that check themselves, presets by name, and where values come from."""
