"""The elements of a page or of a part of one."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "input"}


class Tags(HTMLParser):
    """Collects elements with attributes and text; fails if tags do not nest."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.said = ""  # all text besides styles
        self._open: list[int] = []
        self.feed(data)
        self.close()
        assert not self._open, [self.elements[index][0] for index in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data):
        if not self._open or self.elements[self._open[-1]][0] != "style":
            self.said += data
        for index in self._open:
            self.elements[index][2].append(data)

    def find(self, tag, kind=""):
        return [
            (attrs, "".join(words))
            for name, attrs, words in self.elements
            if name == tag and kind in ("", *attrs.get("class", "").split())
        ]
