//! The state that survives a restart: changes of the books as values, and the files that keep them.

pub mod changes;
pub mod files;
pub mod stored_books;
