"""A/B measurement of a stock server with the overlay off and on: `ab` writes measurements, `report` reads them."""
