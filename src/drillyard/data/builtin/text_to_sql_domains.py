"""The vocabulary of `builtin:text-to-sql`: domains, their columns, and the values that fill them.

A domain is one main table (what a question is about) and one table of events that refers to it by a key. Column names
are shared among domains on purpose: a model has to read which of them a schema holds instead of remembering a domain.
Columns of event tables never occur in main tables, so a joined column needs no qualifier.

Four domains never occur in training; each of them has at least one column that no trained domain has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

DomainRole = Literal["train", "development", "test"]


@dataclass(frozen=True)
class Domain:
    """A main table with a label (unique text), categories (repeating text) and numbers; and its table of events."""

    table: str
    label: str
    categories: tuple[str, ...]
    numbers: tuple[str, ...]
    events: str
    key: str
    event_category: str
    event_numbers: tuple[str, ...]
    role: DomainRole

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the main table, without the key."""
        return (self.label, *self.categories, *self.numbers)

    @property
    def event_columns(self) -> tuple[str, ...]:
        """Columns of the event table, without the key."""
        return (self.event_category, *self.event_numbers)


# Two lines a domain: `table: label; categories; numbers` and `events key; category; numbers`.
_DOMAINS: dict[DomainRole, str] = {
    "train": """
shops: name; city country owner category; rating start_year staff area
  sales shop_id; month; amount quantity tax
films: title; genre country language studio; year length budget rating
  tickets film_id; day; quantity fee
books: title; genre language author category; year pages price rating
  loans book_id; month; fee days
cars: name; brand color country fuel; price year speed weight
  repairs car_id; month; hours amount tax
players: name; team home_city position sport; age height weight salary
  matches player_id; day; points hours
employees: name; department home_city team level; age salary start_year bonus
  projects employee_id; month; hours amount
students: name; home_city department sport level; age height score bonus
  exams student_id; day; points fee
hotels: name; city country owner category; rating price staff floors
  bookings hotel_id; month; days amount tax
songs: title; genre language author studio; year length score budget
  plays song_id; day; quantity hours
dogs: name; color owner breed size; age weight height price
  walks dog_id; day; hours fee points
houses: name; city owner color material; price area floors year
  visits house_id; month; days fee
courses: title; department language level category; price length pages score
  classes course_id; day; hours points
ships: name; country owner fuel material; speed length weight start_year
  trips ship_id; month; days amount
phones: name; brand color size material; unit_price weight year stock
  orders phone_id; day; quantity tax fee
lamps: name; brand material size color; unit_price height stock area
  repairs lamp_id; month; quantity tax
""",
    "development": """
museums: name; city country owner style; price start_year area floors
  tours museum_id; month; hours fee
tools: name; brand color material size; unit_price weight power stock
  rentals tool_id; day; days amount
""",
    "test": """
planes: name; brand country fuel engine; speed weight year distance
  flights plane_id; day; hours quantity
games: title; genre studio language platform; price year rating copies
  downloads game_id; month; amount fee
""",
}


def _read_domains(role: DomainRole) -> Iterator[Domain]:
    lines = _DOMAINS[role].strip().splitlines()
    for main, events in zip(lines[::2], lines[1::2], strict=True):
        table, columns = main.split(": ")
        label, categories, numbers = (part.split() for part in columns.split("; "))
        (name, key), category, event_numbers = (part.split() for part in events.split("; "))
        yield Domain(
            table=table,
            label=label[0],
            categories=tuple(categories),
            numbers=tuple(numbers),
            events=name,
            key=key,
            event_category=category[0],
            event_numbers=tuple(event_numbers),
            role=role,
        )


DOMAINS: tuple[Domain, ...] = tuple(domain for role in _DOMAINS for domain in _read_domains(role))

_LABELS = """
Alpha Amber Aster Bella Birch Bravo Cedar Cleo Coral Delta Dora Duke Echo Ella Ember Falcon Fern Flora Grace
Grove Hazel Hugo Iris Ivory Jade Juno Kilo Kira Lotus Luna Maple Mira Nova Nora Olive Orion Pearl Petra Quartz
Raven Rosa Sage Sierra Tara Tiger Uma Vera Vista Willow Zeta
"""
LABELS: tuple[str, ...] = tuple(_LABELS.split())

# Columns of made-up domains only, besides those of the domains above; a category shares the values of another one.
EXTRA_CATEGORIES: dict[str, str] = {
    "region": "city",
    "origin": "country",
    "keeper": "owner",
    "kind": "category",
    "theme": "genre",
    "dialect": "language",
    "maker": "brand",
    "paint": "color",
    "squad": "team",
    "sector": "department",
    "grade": "level",
    "shape": "size",
    "fabric": "material",
}
_EXTRA_NUMBERS = (
    "width depth volume wage debt profit votes wins losses goals calls mass heat cost worth doors guests rank"
)
EXTRA_NUMBERS: tuple[str, ...] = tuple(_EXTRA_NUMBERS.split())

CATEGORY_VALUES: dict[str, tuple[str, ...]] = {
    name: tuple(values.split())
    for name, values in {
        "city": "Oslo Paris Lima Cairo Delhi Tokyo Rome Berlin",
        "home_city": "Oslo Paris Lima Cairo Delhi Tokyo Rome Berlin",
        "country": "Norway France Peru Egypt India Japan Italy Spain",
        "owner": "Adam Clara David Emma Felix Helen Ivan Julia",
        "author": "Adam Clara David Emma Felix Helen Ivan Julia",
        "category": "Basic Classic Family Luxury Modern Special",
        "genre": "Action Comedy Crime Drama Fantasy Horror Jazz",
        "language": "English French Hindi Arabic German Polish",
        "studio": "Apex Comet Lumen Metro Orbit Prism",
        "brand": "Acme Boreal Corex Dyna Fuji Vega",
        "color": "Black Blue Brown Green Red White Yellow",
        "fuel": "Diesel Electric Gas Hybrid Petrol Solar",
        "team": "Bears Eagles Lions Sharks Tigers Wolves",
        "position": "Back Center Front Guard Left Right",
        "sport": "Boxing Chess Golf Rugby Soccer Tennis",
        "department": "Design Finance Legal Research Sales Support",
        "level": "Beginner Expert Junior Middle Senior",
        "breed": "Beagle Boxer Corgi Husky Poodle Terrier",
        "size": "Large Medium Small Tiny Huge",
        "material": "Brick Glass Steel Stone Wood",
        "style": "Baroque Gothic Modern Roman Rural",
        "engine": "Jet Piston Rotor Turbine Turbo",
        "platform": "Arcade Console Desktop Mobile Tablet",
        "month": "January February March April May June",
        "day": "Monday Tuesday Wednesday Thursday Friday Sunday",
    }.items()
}

# Lowest value, highest value, step. A step keeps numbers short; a range holds far more values than a table has rows.
NUMBER_RANGES: dict[str, tuple[int, int, int]] = {
    "rating": (1, 99, 1),
    "start_year": (1960, 2024, 1),
    "year": (1960, 2024, 1),
    "staff": (2, 90, 1),
    "area": (20, 900, 10),
    "length": (30, 300, 5),
    "budget": (10, 950, 10),
    "pages": (50, 950, 10),
    "price": (5, 500, 5),
    "unit_price": (5, 500, 5),
    "speed": (20, 400, 5),
    "weight": (10, 800, 10),
    "age": (16, 80, 1),
    "height": (50, 220, 1),
    "salary": (1000, 9900, 100),
    "bonus": (100, 990, 10),
    "score": (1, 99, 1),
    "floors": (1, 60, 1),
    "stock": (1, 250, 1),
    "power": (100, 3000, 50),
    "distance": (500, 9900, 100),
    "copies": (1000, 9900, 100),
    "amount": (10, 990, 10),
    "quantity": (1, 60, 1),
    "tax": (1, 80, 1),
    "fee": (5, 300, 5),
    "hours": (1, 90, 1),
    "days": (1, 60, 1),
    "points": (1, 99, 1),
}
CATEGORY_VALUES |= {name: CATEGORY_VALUES[like] for name, like in EXTRA_CATEGORIES.items()}
NUMBER_RANGES |= {name: (1, 999, 1) for name in EXTRA_NUMBERS}
