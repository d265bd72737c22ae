"""Rank pages as the site's own search does, without a browser, and look up what users type.

    python docs/search.py _docs 'why does it recompile'     # the first pages for a query
    python docs/search.py _docs                             # all queries of queries.txt

`rank` follows `searchtools.js` of Sphinx (titles, then terms, all of which a page must have) and `scorer.js` beside it."""
import json, re, sys
from pathlib import Path
from sphinx.search.en import SearchEnglish

language = SearchEnglish({})

def load_index(
    out:Path, # Folder of the site
) -> dict: # What `searchindex.js` holds
    return json.loads((out/'searchindex.js').read_text(encoding='utf-8').removeprefix('Search.setIndex(').removesuffix(')'))

def bonus(
    doc:str, # Name of a page
) -> int: # What `scorer.js` adds
    if doc == 'tutorials/speed': return 13
    if doc == 'api/coverage': return 11
    if doc == 'api/learner': return 4
    if doc == 'start' or doc.startswith('howto/'): return 12
    if doc.startswith(('tutorials/', 'explanations/')): return 8
    return 0 if re.match('api/|internals|changelog', doc) else 4

def as_list(o): return o if isinstance(o, list) else [o]

def by_title(query, index):
    "Pages with a heading that holds the query, which is at least half of it"
    q = query.lower().strip()
    for title,found in index['alltitles'].items():
        if q in title.lower().strip() and len(q) >= len(title)/2:
            for page,_ in found: yield page, int(15*len(q)/len(title) + .5) + (index['titles'][page] == title)

def word_scores(word, index):
    "Page -> score of one word; a word that is no term counts for those that it is a part of"
    res = {}
    for table,full,part in (('terms', 5, 2), ('titleterms', 15, 7)):
        if word in index[table]: hits = [(word, full)]
        else: hits = [(t, part) for t in index[table] if len(word) > 2 and word in t]
        for t,score in hits: res.update({page: score for page in as_list(index[table][t])})
    return res

def by_terms(query, index):
    words = dict.fromkeys(w.lower() for w in re.findall(r'\w+', query) if not w.isdigit())
    words = {language.stem(w) for w in words if w not in language.stopwords}
    scores = {w: word_scores(w, index) for w in words}
    long = sum(len(w) > 2 for w in words)
    for page in set().union(*scores.values()):
        found = [s[page] for s in scores.values() if page in s]
        if len(found) in (len(words), long): yield page, max(found)

def rank(
    query:str, # As typed
    index:dict, # From `load_index`
) -> list: # Names of the pages found, the best first; equal ones as the browser sorts them, by title
    best = {}
    for page,score in [*by_title(query, index), *by_terms(query, index)]:
        doc = index['docnames'][page]
        best[doc] = max(best.get(doc, 0), score + bonus(doc))
    title = dict(zip(index['docnames'], index['titles']))
    return sorted(best, key=lambda d: (-best[d], title[d].lower()))

def queries() -> list: # (query, pages one of which must be among the first three)
    lines = (Path(__file__).parent/'queries.txt').read_text(encoding='utf-8').splitlines()
    return [(q.strip(), pages.split()) for l in lines if l.strip() and l[0] != '#' for q,pages in [l.split('->')]]

def missed(
    out:Path, # Folder of the site
) -> list: # Queries that do not find their page, as text
    index = load_index(out)
    there = set(index['docnames'])
    asked = [(q, [p for p in pages if p in there], rank(q, index)[:3]) for q,pages in queries()]
    return [f'search for "{q}": {pages} is not among {first}' for q,pages,first in asked if pages and not set(pages) & set(first)]

if __name__ == '__main__':
    index = load_index(Path(sys.argv[1]))
    if sys.argv[2:]: print(*rank(' '.join(sys.argv[2:]), index)[:10], sep='\n')
    else: print(*missed(Path(sys.argv[1])) or ['every query finds its page'], sep='\n')
