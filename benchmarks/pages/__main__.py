"""Print the pages' tables, or write them: see `benchmarks.pages`."""

import argparse

from benchmarks import families, pages


def main() -> None:
    parser = argparse.ArgumentParser(description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    args = parser.parse_args()
    tables_of = {pages.FOLDER / name: pages.render(pages.RESULTS, names) for name, names in pages.PAGES.items()}
    for page, tables in (tables_of | {families.PAGE: families.render()}).items():
        if args.write:
            page.write_text(pages.insert(page.read_text(), tables))
            print(f"Wrote {page}")
        else:
            print(tables)


if __name__ == "__main__":
    main()
