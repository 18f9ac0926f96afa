"""What a sweep is asked, what it looks through, and what it leaves behind."""
