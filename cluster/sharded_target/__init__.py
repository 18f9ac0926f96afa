"""A target model split over several devices."""
