// The card of a model as elements: the little Markdown that chasm writes (headings, tables, code, bold). Never as HTML.

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

/** Text with **bold** and `code`. */
function spans(text) {
  return text.split(/(\*\*.+?\*\*|`.+?`)/).filter(Boolean).map((part) => {
    if (part.startsWith('**')) return element('strong', part.slice(2, -2));
    return part.startsWith('`') ? element('code', part.slice(1, -1)) : part;
  });
}

const cells = (line) => line.replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());

function table(lines) {
  const row = (tag) => (line) => element('tr', ...cells(line).map((cell) => element(tag, ...spans(cell))));
  const made = element('table', element('thead', row('th')(lines[0])), element('tbody', ...lines.slice(2).map(row('td'))));
  const around = element('div', made);
  around.className = 'scroll';
  return around;
}

/** Paragraphs, headings, tables and code blocks of a text, as elements. */
export function renderCard(text) {
  const made = [], lines = text.trim().split('\n');
  while (lines.length) {
    const line = lines.shift();
    if (!line.trim()) continue;
    const heading = /^(#+) (.*)/.exec(line);
    if (heading) {
      made.push(element(heading[1].length === 1 ? 'h2' : 'h3', ...spans(heading[2])));
    } else if (line.startsWith('```')) {
      const end = lines.findIndex((other) => other.startsWith('```')), code = lines.splice(0, end < 0 ? lines.length : end);
      lines.shift();
      made.push(element('pre', code.join('\n')));
    } else {
      const block = [line];
      while (lines.length && lines[0].trim() && !/^(#|```)/.test(lines[0])) block.push(lines.shift());
      if (line.startsWith('|') && /^\|[\s:|-]+\|$/.test(block[1] ?? '')) made.push(table(block));
      else made.push(element('p', ...spans(block.join(' '))));
    }
  }
  return made;
}
