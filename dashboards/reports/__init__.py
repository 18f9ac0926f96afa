"""What each study has to show: from its data to sections, for any output to write."""
